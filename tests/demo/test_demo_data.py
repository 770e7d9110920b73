"""The text exists on this machine, and a sample depends on seed and index alone."""

from __future__ import annotations

from pathlib import Path

import torch

from fp8watch.demo import data
from fp8watch.demo.model import GPT, Shape, layer_names
from fp8watch.emulation import convert


def test_the_corpus_is_python_source() -> None:
    text = data.corpus()
    assert 64 * 1024 <= len(text) <= data.CORPUS_LIMIT_BYTES
    assert bytes(text).count(b"import ") > 100


def test_source_files_come_in_one_order_without_tests(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a.py", "test/x.py", "a/tests/y.py", "site-packages/q.py", "_sysconfigdata_x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    found = [path.relative_to(tmp_path).as_posix() for path in data.source_files(tmp_path)]
    assert found == ["a.py", "a/z.py", "b.py"]


def test_windows_repeat_and_differ_by_seed() -> None:
    first, again, other = (data.Windows(seed=seed, num_samples=8, length=32) for seed in (1, 1, 2))
    assert all(torch.equal(first[i][0], again[i][0]) for i in range(8))
    assert any(not torch.equal(first[i][0], other[i][0]) for i in range(8))


def test_targets_are_the_inputs_one_byte_on() -> None:
    inputs, targets, weight = data.Windows(seed=0, num_samples=1, length=32)[0]
    assert torch.equal(inputs[1:], targets[:-1])
    assert float(weight) == 1.0


def test_the_model_is_causal() -> None:
    model = GPT(Shape(num_layers=1, width=32, length=16))
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


def test_layer_names_are_the_modules_that_run_in_fp8() -> None:
    shape = Shape(num_layers=2, width=32, length=16)
    model = GPT(shape)
    assert convert(model, filter=lambda name, linear: name.startswith("blocks.")) == layer_names(shape)
