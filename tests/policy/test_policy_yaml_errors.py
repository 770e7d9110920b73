"""Any exception of the YAML library becomes bad input with a line."""

from __future__ import annotations

import pytest

from fp8watch.errors import BadInput
from fp8watch.policy.load import load


@pytest.mark.parametrize("value", ["!!int 0x", "!!int _", '!!int ""', "!!float _"])
def test_odd_numbers_are_bad_input_at_their_line(value: str) -> None:
    with pytest.raises(BadInput) as caught:
        load(f"# a policy\nmode: observe\nversion: {value}\n")
    assert caught.value.problems[0].startswith("<policy>:3: ")


def test_a_name_that_no_file_can_have_is_bad_input() -> None:
    with pytest.raises(BadInput, match="null byte"):
        load("a\0b")
