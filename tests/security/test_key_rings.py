"""Keys: where they come from, what is refused, and how they are replaced while a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from fp8watch.errors import BadInput
from fp8watch.security import KeyRing, load_ring
from fp8watch.settings import Settings

OLD, NEW = "a" * 40, "b" * 40


def ring(*keys: str) -> KeyRing:
    return KeyRing("command", tuple(key.encode() for key in keys))


def test_nothing_configured_is_no_ring() -> None:
    assert load_ring(Settings(), "command") is None


def test_key_from_environment_and_from_file_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"# made by openssl rand\n\n{OLD}\n")
    monkeypatch.setenv("FP8WATCH_COMMAND_KEY", OLD)
    from_text = load_ring(Settings(), "command")
    monkeypatch.delenv("FP8WATCH_COMMAND_KEY")
    monkeypatch.setenv("FP8WATCH_COMMAND_KEY_FILE", str(path))
    from_file = load_ring(Settings(), "command")
    assert from_text is not None
    assert from_file is not None
    assert from_file.verify(b"payload", from_text.sign(b"payload"))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n", "\r\n\r\n", " \t\r\n", "\r"])
@pytest.mark.parametrize("comment", ["", "# made by openssl rand -hex 32, kept in the vault\n"])
def test_how_an_editor_ends_and_marks_a_file_is_no_part_of_its_keys(
    tmp_path: Path, mark: bytes, end: str, comment: str
) -> None:
    path = tmp_path / "key"
    path.write_bytes(mark + f"{comment}{NEW}{end or chr(10)}{OLD}{end}".encode())
    found = load_ring(Settings(command_key_file=path), "command")
    assert found is not None
    assert found.sign(b"p") == ring(NEW).sign(b"p")
    assert found.verify(b"p", ring(OLD).sign(b"p"))


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (f"{OLD}\n".encode("utf-16"), "save it as UTF-8"), (f"{OLD}\n".encode("utf-16-be"), "save it as UTF-8"),
        (OLD.encode() + b"\xff\n", "no UTF-8 text"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_said_and_shows_nothing_of_it(tmp_path: Path, raw: bytes, problem: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(raw)
    with pytest.raises(BadInput, match=problem) as error:
        load_ring(Settings(command_key_file=path), "command")
    assert error.value.problems[0].startswith(f"{path}:1: FP8WATCH_COMMAND_KEY_FILE: ")
    assert "aaa" not in error.value.problems[0]


def test_the_new_key_signs_and_the_old_one_is_still_verified() -> None:
    during = ring(NEW, OLD)
    assert during.verify(b"p", ring(OLD).sign(b"p"))
    assert during.sign(b"p") == ring(NEW).sign(b"p")
    assert not ring(NEW).verify(b"p", ring(OLD).sign(b"p"))


def test_one_secret_for_two_purposes_makes_two_signatures() -> None:
    commands, frames = KeyRing("command", (OLD.encode(),)), KeyRing("frame", (OLD.encode(),))
    assert not frames.verify(b"p", commands.sign(b"p"))


def test_fingerprints_tell_keys_apart_and_are_no_part_of_a_key_or_signature() -> None:
    assert ring(NEW, OLD).fingerprints == [*ring(NEW).fingerprints, *ring(OLD).fingerprints]
    both = {*ring(NEW).fingerprints, *ring(OLD).fingerprints}
    assert len(both | set(KeyRing("frame", (OLD.encode(),)).fingerprints)) == 3, "of two purposes, too"
    for fingerprint in both:
        assert fingerprint not in OLD + NEW
        assert not ring(OLD).verify(b"p", bytes.fromhex(fingerprint))


@pytest.mark.parametrize("signature", [b"", b"\0" * 32, b"x", b"y" * 4096])
def test_what_is_no_signature_is_refused(signature: bytes) -> None:
    assert not ring(OLD).verify(b"p", signature)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("short", "at least 32"), ("", "no key"), ("# only a comment\n", "no key"), ("\n".join([OLD] * 9), "at most 8")],
)
def test_bad_keys_are_named_with_file_and_variable(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(BadInput, match=problem) as error:
        load_ring(Settings(command_key_file=path), "command")
    assert all(str(path) in line and "FP8WATCH_COMMAND_KEY_FILE" in line for line in error.value.problems)


def test_a_file_that_is_not_there_and_both_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        load_ring(Settings(frame_key_file=tmp_path / "absent"), "frame")
    with pytest.raises(BadInput, match="give one of them"):
        load_ring(Settings(frame_key=SecretStr(OLD), frame_key_file=tmp_path / "absent"), "frame")


def test_no_secret_shows_in_settings_or_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8WATCH_APPROVAL_KEY", OLD)
    settings = Settings()
    found = load_ring(settings, "approval")
    assert OLD not in repr(settings)
    assert OLD not in repr(found)
    assert OLD not in settings.model_dump_json()
