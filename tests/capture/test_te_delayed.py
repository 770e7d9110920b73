"""Transformer Engine's delayed scaling through a double of its global buffers and update kernel.

The double keeps what the real library does (TE 2.20 `pytorch/quantization.py`, `delayed_scaling.cu`): modules
register once, amaxes are concatenated over all models, row 0 is zeroed and the newest amax goes to the last
row, a zero amax rolls nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8watch.capture.frames import LayoutBook, StepNote, build_frame, device_values
from fp8watch.capture.ring import Ring
from fp8watch.capture.source import Pieces
from fp8watch.capture.te.delayed import TeDelayedSource
from fp8watch.capture.te.slots import slot_names
from fp8watch.capture.te.tap import UPDATE, update_tap
from fp8watch.columns import unpack

FP8_MAX = {True: 448.0, False: 57344.0}


class Library:
    """Stands in for transformer_engine_torch and the global buffers."""

    def __init__(self) -> None:
        self.registered: dict[bool, list[Any]] = {True: [], False: []}
        setattr(self, UPDATE, self.kernel)

    def kernel(self, amax: torch.Tensor, histories: list[Any], scales: list[Any], algo: str, fp8_max: float) -> None:
        for part, history, scale in zip(amax.split([s.numel() for s in scales]), histories, scales, strict=True):
            live = part != 0
            rolled = torch.roll(history, -1, 0)
            rolled[-1] = part
            rolled[0] = 0 if len(history) > 1 else part
            history.copy_(torch.where(live, rolled, history))
            window = history.max(0).values if algo == "max" else part
            usable = live & torch.isfinite(window) & (window > 0)
            scale.copy_(torch.where(usable, fp8_max / window, scale))
            if len(history) == 1:
                history.zero_()

    def micro_batch(self, forward: bool, amaxes: dict[str, list[float]]) -> None:
        modules = self.registered[forward]
        key = "scaling_fwd" if forward else "scaling_bwd"
        states = [module.fp8_meta[key] for module in modules]
        vector = torch.cat(
            [torch.tensor(amaxes.get(m.label, [0.0] * s.scale.numel())) for m, s in zip(modules, states, strict=True)]
        )
        getattr(self, UPDATE)(
            vector, [s.amax_history for s in states], [s.scale for s in states], "max", FP8_MAX[forward]
        )


class Linear(torch.nn.Module):
    def __init__(self, library: Library, label: str, history_len: int = 4) -> None:
        super().__init__()
        self.label = label
        self.fp8_meta = {
            "recipe": SimpleNamespace(margin=0, amax_compute_algo="max", fp8_format="Format.HYBRID"),
            "scaling_fwd": SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(history_len, 3)),
            "scaling_bwd": SimpleNamespace(scale=torch.ones(2), amax_history=torch.zeros(history_len, 2)),
        }
        for forward in (True, False):
            library.registered[forward].append(self)


Linear.__name__ = "Linear"


def model(library: Library, *labels: str, **options: Any) -> torch.nn.Module:
    return torch.nn.ModuleDict({label: Linear(library, label, **options) for label in labels})


@pytest.fixture
def library() -> Library:
    return Library()


def test_amax_and_the_scale_just_used_are_seen_every_step(library: Library) -> None:
    source = TeDelayedSource(model(library, "a", "b"), extension=library)
    library.micro_batch(True, {"a": [2.0, 4.0, 0.0], "b": [1.0, 8.0, 0.0]})
    library.micro_batch(False, {"a": [0.5, 0.0], "b": [0.25, 0.0]})
    first = source.read()
    source.begin(with_statistics=False)
    library.micro_batch(True, {"a": [3.0, 4.0, 0.0], "b": [1.0, 8.0, 0.0]})
    library.micro_batch(False, {"a": [0.5, 0.0], "b": [0.25, 0.0]})
    second = source.read()
    assert first is not None
    assert second is not None
    names = [column.name for column in source.columns()]
    assert names[:3] == ["a:input", "a:weight", "a:output"]
    scale = dict(zip(names, second.values["scale"].tolist(), strict=True))
    assert first.values["scale"].tolist() == [1.0] * 10
    assert scale["a:input"] == 448 / 2
    assert scale["b:weight"] == 448 / 8
    assert scale["a:grad_output"] == 57344 / 0.5
    assert dict(zip(names, second.values["amax"].tolist(), strict=True))["a:input"] == 3.0
    # Boundary slots stay 0 forever: not observed, never shown as zeros.
    assert not dict(zip(names, second.validity("amax").tolist(), strict=True))["a:output"]
    source.detach()


def test_our_maximum_covers_all_micro_batches(library: Library) -> None:  # case: NUM-06
    source = TeDelayedSource(model(library, "a"), extension=library)
    for amax in (2.0, 9.0, 3.0):
        library.micro_batch(True, {"a": [amax, 1.0, 0.0]})
    reading = source.read()
    assert reading is not None
    assert reading.values["amax"][0] == 9.0
    assert reading.values["amax_last"][0] == 3.0
    assert reading.updates_forward == 3
    source.detach()


def test_history_length_one_still_shows_the_amax(library: Library) -> None:
    source = TeDelayedSource(model(library, "a", history_len=1), extension=library)
    library.micro_batch(True, {"a": [2.0, 1.0, 0.0]})
    reading = source.read()
    assert reading is not None
    assert reading.values["amax"][0] == 2.0
    source.detach()


def test_scale_written_between_steps_is_the_one_shown(library: Library) -> None:
    """A repair, a restored checkpoint: what the step before left is not what the casts used."""
    trained = model(library, "a")
    source = TeDelayedSource(trained, extension=library)
    scale = trained["a"].fp8_meta["scaling_fwd"].scale
    for written in (None, 7.0, None, 9.0):
        source.begin(with_statistics=False)
        if written is not None:
            scale[0] = written
        wanted = scale.tolist()
        library.micro_batch(True, {"a": [2.0, 3.0, 0.0]})
        reading = source.read()
        assert reading is not None
        assert reading.values["scale"].tolist() == wanted
    source.detach()


def test_last_scale_of_an_accumulated_step_is_shown(library: Library) -> None:
    trained = model(library, "a")
    source = TeDelayedSource(trained, extension=library)
    scale = trained["a"].fp8_meta["scaling_fwd"].scale
    for _ in range(3):
        source.begin(with_statistics=False)
        for amax in (2.0, 4.0, 16.0):
            wanted = scale.tolist()
            library.micro_batch(True, {"a": [amax, 1.0, 0.0]})
        reading = source.read()
        assert reading is not None
        assert reading.values["scale"].tolist()[:2] == wanted[:2]
        assert reading.values["amax"].tolist()[0] == 16.0
    source.detach()


def test_usual_step_concatenates_once_an_update(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TeDelayedSource(model(library, "a", "b"), extension=library)
    scales: list[list[float]] = []
    original, calls = torch.cat, iter(range(99))
    for step in range(4):
        source.begin(with_statistics=False)
        used = [s.fp8_meta[k].scale.clone() for k in ("scaling_fwd", "scaling_bwd") for s in library.registered[True]]
        vectors = [torch.full((6,), 2.0 + step), torch.full((4,), 0.5)]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "cat", lambda *args, **options: (next(calls), original(*args, **options))[1])
            for vector, forward in zip(vectors, (True, False), strict=True):
                states = [m.fp8_meta["scaling_fwd" if forward else "scaling_bwd"] for m in library.registered[forward]]
                getattr(library, UPDATE)(
                    vector, [s.amax_history for s in states], [s.scale for s in states], "max", FP8_MAX[forward]
                )
            reading = source.read()
        assert reading is not None
        assert isinstance(reading.values, Pieces)
        assert all(part is vector for part, vector in zip(reading.values.parts["amax"], vectors, strict=True))
        assert torch.equal(reading.values["scale"], torch.cat(used))
        assert torch.equal(reading.values["amax"], torch.cat(vectors))
        scales.append(reading.values["scale"].tolist())
    assert scales[1] != scales[2]
    assert next(calls) == 4 * 2  # the scales of each direction; TE's own vectors of amaxes go on as they are
    source.detach()


def test_what_a_rank_had_before_the_reduction_is_seen(library: Library) -> None:
    class Manager:
        @staticmethod
        def reduce_tensor_across_group_op_max(tensor: torch.Tensor, group: Any) -> None:
            tensor.fill_(100.0)  # another rank's

    untouched = Manager.__dict__["reduce_tensor_across_group_op_max"]
    library.manager = Manager
    trained = model(library, "a")
    source = TeDelayedSource(trained, extension=library)
    state = trained["a"].fp8_meta["scaling_fwd"]
    for own in (2.0, 3.0):
        source.begin(with_statistics=False)
        for factor in (1.0, 0.5):
            vector = torch.full((3,), own * factor)
            Manager.reduce_tensor_across_group_op_max(vector, None)
            getattr(library, UPDATE)(vector, [state.amax_history], [state.scale], "max", 448.0)
        reading = source.read()
        assert reading is not None
        assert reading.values["amax"].tolist() == [100.0] * 3
        assert reading.values["amax_local"].tolist() == [own] * 3
    source.detach()
    assert Manager.__dict__["reduce_tensor_across_group_op_max"] is untouched


class DotProductAttention(Linear):
    """Attention outside FP8: 9 and 6 slots, of which three each have a meaning."""

    def __init__(self, library: Library, label: str) -> None:
        super().__init__(library, label)
        for key, slots in (("scaling_fwd", 9), ("scaling_bwd", 6)):
            self.fp8_meta[key] = SimpleNamespace(scale=torch.ones(slots), amax_history=torch.zeros(4, slots))


def test_only_our_columns_are_picked_from_the_vectors_on_host_and_device_alike(library: Library) -> None:
    """Vectors hold slots without a meaning and other models' tensors; they reach the host as they are."""
    ours = model(library, "a")
    model(library, "of_another_model")
    ours["attention"] = DotProductAttention(library, "attention")
    ours["b"] = Linear(library, "b")
    source = TeDelayedSource(ours, extension=library)
    ring: Ring[StepNote] = Ring(torch.device("cpu"))
    book = LayoutBook("r", 0)
    for step in range(1, 4):
        source.begin(with_statistics=False)
        wanted = {}
        for forward, key in ((True, "scaling_fwd"), (False, "scaling_bwd")):
            amaxes = {}
            for i, module in enumerate(library.registered[forward]):
                scale = module.fp8_meta[key].scale
                amaxes[module.label] = [step + 100 * i + slot for slot in range(scale.numel())]
                names = slot_names(module, module.label, forward=forward, num_slots=scale.numel())
                for slot, used, amax in zip(names, scale.tolist(), amaxes[module.label], strict=True):
                    if slot is not None and module.label != "of_another_model":
                        wanted[":".join(slot)] = (amax, used)
            library.micro_batch(forward, amaxes)
        reading = source.read()
        assert reading is not None
        names = [column.name for column in source.columns()]
        assert names == list(wanted)
        assert len(names) == 2 * 5 + 3 + 3
        found = zip(reading.values["amax"].tolist(), reading.values["scale"].tolist(), strict=True)
        assert dict(zip(names, found, strict=True)) == wanted
        assert isinstance(reading.values, Pieces)
        assert reading.values.places is not None
        book.update(source.columns(), [], 0, 0)
        note = StepNote(
            step=step, attempt=0, layout=book.current, time_unix=0.0, places=reading.values.places.host,
            zero_is_unseen=reading.zero_is_unseen,
        )  # fmt: skip
        assert ring.push(device_values({"loss": torch.tensor(1.0)}, reading), note)
        ((_, arrived),) = ring.poll()
        columns = build_frame("r", 0, note, arrived).columns
        sent = zip(unpack(columns["amax"])[0].tolist(), unpack(columns["scale"])[0].tolist(), strict=True)
        assert dict(zip(names, sent, strict=True)) == wanted
        assert unpack(columns["scale"])[1].all()
    source.detach()


def test_two_recipes_have_a_vector_each(library: Library) -> None:
    trained = model(library, "a", "b")
    source = TeDelayedSource(trained, extension=library)
    for step in range(3):
        source.begin(with_statistics=False)
        for label, amax in (("a", 2.0), ("b", 5.0 + step)):
            state = trained[label].fp8_meta["scaling_fwd"]
            getattr(library, UPDATE)(torch.full((3,), amax), [state.amax_history], [state.scale], "max", 448.0)
        reading = source.read()
        assert reading is not None
        assert [c.module for c in source.columns()] == ["a"] * 3 + ["b"] * 3
        assert reading.values["amax"].tolist() == [2.0] * 3 + [5.0 + step] * 3
    source.detach()


def test_two_models_in_one_process_do_not_leak_columns(library: Library) -> None:
    teacher, student = model(library, "t1", "t2"), model(library, "s1")
    first, second = TeDelayedSource(teacher, extension=library), TeDelayedSource(student, extension=library)
    original = library.kernel
    library.micro_batch(True, {"t1": [1.0] * 3, "t2": [2.0] * 3, "s1": [5.0] * 3})
    assert {c.module for c in first.columns()} == {"t1", "t2"}
    assert {c.module for c in second.columns()} == {"s1"}
    reading = second.read()
    assert reading is not None
    assert reading.values["amax"].tolist() == [5.0] * 3
    first.detach()
    assert getattr(library, UPDATE) != original
    second.detach()
    assert getattr(library, UPDATE) == original


def test_a_module_that_joins_later_makes_a_new_layout(library: Library) -> None:
    grown = model(library, "a")
    source = TeDelayedSource(grown, extension=library)
    library.micro_batch(True, {"a": [1.0] * 3})
    assert len(source.columns()) == 3
    grown["b"] = Linear(library, "b")
    library.micro_batch(True, {"a": [1.0] * 3, "b": [7.0] * 3})
    reading = source.read()
    assert reading is not None
    assert [c.module for c in source.columns()] == ["a"] * 3 + ["b"] * 3
    assert reading.values["amax"].tolist() == [1.0] * 3 + [7.0] * 3
    source.detach()


def test_a_tap_that_raises_switches_itself_off_and_training_goes_on(library: Library) -> None:
    tap = update_tap(library)
    calls: list[int] = []

    def broken(amax: torch.Tensor, scales: Any) -> None:
        calls.append(1)
        raise RuntimeError("no")

    tap.subscribe(broken)
    trained = model(library, "a")
    for _ in range(3):
        library.micro_batch(True, {"a": [2.0, 2.0, 0.0]})
    assert len(calls) == 1
    assert tap.num_failures == 1
    assert trained["a"].fp8_meta["scaling_fwd"].scale[0] == 224
    tap.unsubscribe(broken)


def test_slots_of_modules_with_several_gemms() -> None:
    mlp = type("LayerNormMLP", (), {})()
    names = slot_names(mlp, "mlp", forward=True, num_slots=6)
    assert names[3] == ("mlp.fc2", "input")
    assert slot_names(mlp, "mlp", forward=False, num_slots=4)[2] == ("mlp.fc2", "grad_output")
    grouped = type("GroupedLinear", (), {})()
    assert slot_names(grouped, "moe", forward=True, num_slots=9)[7] == ("moe.gemm_2", "weight")
    attention = type("DotProductAttention", (), {})()
    slots = slot_names(attention, "attn", forward=True, num_slots=9)
    assert [i for i, slot in enumerate(slots) if slot] == [2, 3, 8]
