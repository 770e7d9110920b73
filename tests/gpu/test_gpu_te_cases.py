"""Ways in which real trainings use Transformer Engine, on a GPU: the values of our columns in each."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from transformer_engine.common.recipe import DelayedScaling, Format  # noqa: E402

import fp8watch  # noqa: E402
from fp8watch.capture import sources  # noqa: E402
from fp8watch.capture.te.source import TeSource  # noqa: E402
from fp8watch.capture.te.tap import update_tap  # noqa: E402
from fp8watch.settings import Settings  # noqa: E402

BF16 = {"params_dtype": torch.bfloat16}


def recipe(**options: Any) -> Any:
    return DelayedScaling(fp8_format=Format.HYBRID, **{"amax_history_len": 16, "amax_compute_algo": "max", **options})


def batch(seed: int, factor: float = 1.0, width: int = 256, rows: int = 64) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, width, device="cuda", generator=generator).mul_(factor).bfloat16()


def train(model: Any, x: Any, scaling: Any, **options: Any) -> torch.Tensor:
    with te.autocast(enabled=True, recipe=scaling):
        output = model(x, **options)
    output.float().square().mean().backward()
    return output


def column(source: TeSource, reading: Any, name: str, key: str = "amax") -> float:
    held = key if key in reading.values else "amax"
    return reading.values[held][[c.name for c in source.columns()].index(name)].item()


def names(source: TeSource, reading: Any) -> list[str]:
    return [c.name for c, seen in zip(source.columns(), reading.validity("amax").tolist(), strict=True) if seen]


def amax(tensor: torch.Tensor) -> float:
    return tensor.detach().abs().max().item()


def test_accumulation_gives_the_largest_of_all_micro_batches(watching: Any) -> None:  # case: NUM-06
    model, scaling = torch.nn.Sequential(te.Linear(256, 256, **BF16)).cuda(), recipe()
    source = watching(model)
    for _ in range(2):
        source.begin(with_statistics=False)
        for i, factor in enumerate((1.0, 8.0, 0.5)):
            train(model, batch(i, factor), scaling)
        reading = source.read()
        assert (reading.updates_forward, reading.updates_backward) == (3, 3)
        assert column(source, reading, "0:input") == amax(batch(1, 8.0))
        assert column(source, reading, "0:input", "amax_last") == amax(batch(2, 0.5))


def test_cached_weights_are_seen_in_the_micro_batch_that_cast_them(watching: Any) -> None:
    model, scaling = te.Linear(256, 256, **BF16).cuda(), recipe()
    source = watching(torch.nn.ModuleDict({"a": model}))
    for _ in range(2):
        source.begin(with_statistics=False)
        for i in range(3):
            train(model, batch(i), scaling, is_first_microbatch=i == 0)
        reading = source.read()
        assert column(source, reading, "a:weight") == amax(model.weight)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_changes_nothing_in_our_columns(watching: Any, reentrant: bool) -> None:  # case: HOK-06
    def run(recompute: bool) -> dict[str, list[float]]:
        torch.manual_seed(0)
        model, scaling = torch.nn.Sequential(*[te.LayerNormMLP(256, 512, **BF16) for _ in range(3)]).cuda(), recipe()
        source = watching(model)
        for step in range(4):
            source.begin(with_statistics=step == 3)
            with te.autocast(enabled=True, recipe=scaling):
                hidden = batch(step).requires_grad_()
                for layer in model:
                    hidden = te.checkpoint(layer, hidden, use_reentrant=reentrant) if recompute else layer(hidden)
            hidden.float().square().mean().backward()
            reading = source.read()
        assert reading.updates_forward == 1
        return {
            "names": names(source, reading),
            **{key: reading.values[key].tolist() for key in ("amax", "scale", "quantized")},
        }

    assert run(True) == run(False)


def test_history_of_one_and_layernorm_mlp(watching: Any) -> None:
    model, scaling = (
        te.LayerNormMLP(256, 512, **BF16).cuda(),
        recipe(amax_history_len=1, amax_compute_algo="most_recent"),
    )
    source = watching(torch.nn.ModuleDict({"mlp": model}))
    for step in range(3):
        source.begin(with_statistics=False)
        train(model, batch(step), scaling)
        reading = source.read()
    assert names(source, reading) == [
        "mlp.fc1:input", "mlp.fc1:weight", "mlp.fc2:input", "mlp.fc2:weight", "mlp.fc1:grad_output",
        "mlp.fc2:grad_output",
    ]  # fmt: skip
    assert column(source, reading, "mlp.fc1:weight") == amax(model.fc1_weight)
    assert column(source, reading, "mlp.fc2:weight") == amax(model.fc2_weight)
    assert {c.history_len for c in source.columns()} == {1}
    assert source.not_observable() == []


def test_grouped_linear_has_a_row_a_gemm(watching: Any) -> None:
    model, scaling = te.GroupedLinear(2, 256, 256, **BF16).cuda(), recipe()
    source = watching(torch.nn.ModuleDict({"moe": model}))
    x = torch.cat([batch(1, 1.0), batch(2, 4.0)])
    for step in range(2):
        source.begin(with_statistics=step == 1)
        with te.autocast(enabled=True, recipe=scaling):
            output = model(x, [64, 64])
        output.float().square().mean().backward()
        reading = source.read()
    assert column(source, reading, "moe.gemm_0:weight") == amax(model.weight0)
    assert column(source, reading, "moe.gemm_1:weight") == amax(model.weight1)
    assert column(source, reading, "moe.gemm_1:input") == amax(batch(2, 4.0))
    assert column(source, reading, "moe.gemm_1:grad_output") > 0
    assert source.not_observable() == []
    counted = dict(zip([c.name for c in source.columns()], reading.values["quantized"].tolist(), strict=True))
    assert counted["moe.gemm_0:input"] == 64 * 256


def test_operations_are_read(watching: Any) -> None:
    model, scaling = te.ops.Sequential(te.ops.Linear(256, 256, dtype=torch.bfloat16, device="cuda")), recipe()
    found = sources.find(model)
    assert found.framework == "Transformer Engine"
    assert found.unseen == []
    source = found.sources[0]
    try:
        for step in range(3):
            source.begin(with_statistics=step == 2)
            train(model, batch(step), scaling)
            reading = source.read()
        seen = names(source, reading)
        assert [name.rpartition(":")[2] for name in seen] == ["input", "weight", "grad_output"]
        assert column(source, reading, seen[0]) == amax(batch(2))
        assert reading.valid["quantized"].all()
        assert source.not_observable() == []
    finally:
        source.detach()


def test_fp8_attention_has_its_own_rows(watching: Any) -> None:
    scaling = recipe(fp8_dpa=True)
    model = te.TransformerLayer(
        256, 512, 2, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd", **BF16
    ).cuda()  # fmt: skip
    source = watching(model)
    x = torch.randn(2, 128, 256, device="cuda").bfloat16()
    for _ in range(3):
        source.begin(with_statistics=False)
        train(model, x, scaling)
        reading = source.read()
    attention = [name for name in names(source, reading) if "core_attention" in name]
    if not attention:
        pytest.skip("this build or GPU ran attention outside FP8")
    assert {name.rpartition(".")[2] for name in attention} >= {"qkv:input", "s:output"}


def test_graphed_layers_are_seen_at_every_replay(watching: Any) -> None:  # case: HOK-19
    scaling = recipe()
    plain = te.Linear(256, 256, **BF16).cuda()
    model = torch.nn.ModuleDict({"a": plain})
    sample = batch(0).requires_grad_()
    graphed = te.make_graphed_callables(plain, (sample,), enabled=True, recipe=scaling)
    source = watching(model)
    for step in range(1, 5):
        source.begin(with_statistics=step == 3)
        x = batch(step, float(step)).requires_grad_()
        with te.autocast(enabled=True, recipe=scaling):
            output = graphed(x)
        output.float().square().mean().backward()
        reading = source.read()
        assert column(source, reading, "a:input") == amax(x)
        assert column(source, reading, "a:grad_output") > 0
    assert source.not_observable() == []


def test_weights_that_exist_in_fp8_only(watching: Any) -> None:
    scaling = recipe()
    with te.quantized_model_init(enabled=True, recipe=scaling):
        layer = te.Linear(256, 256, **BF16).cuda()
    model = torch.nn.ModuleDict({"a": layer})
    source = watching(model)
    for step in range(3):
        source.begin(with_statistics=step == 2)
        train(layer, batch(step), scaling)
        reading = source.read()
    assert "a:input" in names(source, reading)
    assert "a:grad_output" in names(source, reading)
    assert "a:weight" not in names(source, reading)  # no cast in a step without an optimizer: not shown as zero


def test_two_recipes_in_one_model_have_a_vector_each(watching: Any) -> None:
    model = torch.nn.Sequential(te.Linear(256, 256, **BF16), te.Linear(256, 256, **BF16)).cuda()
    first, second = recipe(), recipe(margin=2)
    source = watching(model)
    for step in range(3):
        source.begin(with_statistics=False)
        with te.autocast(enabled=True, recipe=first):
            hidden = model[0](batch(step))
        with te.autocast(enabled=True, recipe=second):
            output = model[1](hidden)
        output.float().square().mean().backward()
        reading = source.read()
        held = [c.name for c in source.columns()]
    assert len(held) == len(set(held)) == 10
    assert {"0:input", "1:input", "0:grad_output", "1:grad_output"} <= set(names(source, reading))
    assert {c.margin for c in source.columns() if c.module == "1"} == {2.0}
    assert column(source, reading, "0:input") == amax(batch(2))


def attach(model: torch.nn.Module, folder: Path, run: str) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    settings = Settings(dir=folder, report=False, agent=f"unix://{folder}/nobody.sock")
    return fp8watch.attach(model, optimizer, run=run, settings=settings), optimizer


@pytest.mark.parametrize("teacher_first", [True, False])
def test_teacher_and_student_do_not_mix(tmp_path: Path, teacher_first: bool) -> None:
    import transformer_engine_torch as tex

    before = tex.fused_amax_and_scale_update_after_reduction
    torch.manual_seed(0)
    teacher = torch.nn.Sequential(te.Linear(256, 256, **BF16), te.Linear(256, 256, **BF16)).cuda()
    student, scaling = torch.nn.Sequential(te.Linear(256, 256, **BF16)).cuda(), recipe()
    watches = [attach(teacher, tmp_path, "teacher"), attach(student, tmp_path, "student")]
    for step in range(4):
        for model, (watch, optimizer), factor in zip((teacher, student), watches, (1.0, 64.0), strict=True):
            loss = train(model, batch(step, factor), scaling).float().mean()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    layouts = [watch._recorder.layout for watch, _ in watches]
    assert [{c.module for c in layout.columns} for layout in layouts] == [{"0", "1"}, {"0"}]
    assert [layout.not_observable for layout in layouts] == [[], []]
    first, second = watches if teacher_first else watches[::-1]
    first[0].detach()
    train(student, batch(9), scaling)
    assert tex.fused_amax_and_scale_update_after_reduction is not before
    second[0].detach()
    assert tex.fused_amax_and_scale_update_after_reduction is before


def test_no_tensor_of_the_user_outlives_its_step(tmp_path: Path) -> None:  # case: HOK-07
    model, scaling = (
        torch.nn.Sequential(te.LayerNormMLP(256, 512, **BF16), te.Linear(256, 256, **BF16)).cuda(),
        recipe(),
    )
    watch, optimizer = attach(model, tmp_path, "refs")
    held: list[weakref.ref[torch.Tensor]] = []
    hook = model[0].register_forward_hook(lambda _, args, output: held.append(weakref.ref(output)))
    for step in range(12):  # sampled steps 1 and 11 among them
        x = batch(step).requires_grad_()
        with te.autocast(enabled=True, recipe=scaling):
            loss = model(x).float().square().mean()
        loss.backward()
        held += [weakref.ref(x), weakref.ref(loss), *(weakref.ref(p.grad) for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
        del x, loss
        gc.collect()
        alive = [ref for ref in held if ref() is not None]
        assert alive == [], step
        held.clear()
    hook.remove()
    watch.detach()


def test_tap_that_raises_is_counted_and_training_goes_on(tmp_path: Path, caplog: Any) -> None:  # case: NUM-18
    model, scaling = torch.nn.Sequential(te.Linear(256, 256, **BF16)).cuda(), recipe()
    watch, optimizer = attach(model, tmp_path, "broken")
    source = watch._recorder._source

    def broken(*_: Any) -> None:
        raise RuntimeError("no")

    tap = update_tap()
    before = tap.num_failures
    source._delayed._index = broken
    for step in range(3):
        loss = train(model, batch(step), scaling).float().mean()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    assert tap.num_failures == before + 1
    assert "switched off" in caplog.text
    assert watch.not_observable
    watch.detach()


def test_counts_are_those_of_the_cast_that_was_made(watching: Any) -> None:
    model, scaling = (
        torch.nn.Sequential(te.LayerNormMLP(256, 512, **BF16), te.Linear(256, 256, **BF16)).cuda(),
        recipe(),
    )
    source = watching(model)
    for step in range(4):
        source.begin(with_statistics=step == 3)
        x = batch(step, 1.0 if step < 3 else 16.0)  # the scale of the last step lags behind
        hidden: list[torch.Tensor] = []
        hook = model[1].register_forward_pre_hook(
            lambda _, args, hidden=hidden: hidden.append(args[0].detach().clone())
        )
        if step == 3:
            model[1].fp8_meta["scaling_fwd"].scale[0] *= 2.0**12
        train(model, x, scaling)
        hook.remove()
        reading = source.read()
    at = [c.name for c in source.columns()].index("1:input")
    scale = reading.values["scale"][at]
    scaled = hidden[0].float() * scale
    codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert reading.values["quantized"][at].item() == hidden[0].numel()
    assert reading.values["saturated"][at].item() == (scaled.abs() > 448).sum().item() > 0
    assert reading.values["underflowed"][at].item() == ((hidden[0] != 0) & (codes == 0)).sum().item()
    error = ((scaled - codes) / scale).double().square().mean().item()
    assert reading.values["mse"][at].item() == pytest.approx(error, rel=1e-3)
    live = reading.validity("amax")
    assert torch.equal(reading.valid["quantized"], live)  # every cast of the model was met, fused ones too
    assert (reading.values["nonfinite"][live] == 0).all()


def test_nan_that_amax_hides_is_counted(watching: Any) -> None:  # case: NUM-15
    model, scaling = torch.nn.Sequential(te.Linear(256, 256, **BF16)).cuda(), recipe()
    source = watching(model)
    train(model, batch(0), scaling)
    source.begin(with_statistics=True)
    x = batch(1)
    x[3, 5] = float("nan")
    train(model, x, scaling)
    reading = source.read()
    at = [c.name for c in source.columns()].index("0:input")
    assert reading.values["nonfinite"][at].item() == 1
    assert torch.isfinite(reading.values["amax"][at])


@pytest.mark.parametrize("statistics", [False, True])
def test_nothing_changes_and_nothing_waits(watching: Any, statistics: bool) -> None:  # case: HOK-15
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(te.LayerNormMLP(256, 512, **BF16), te.Linear(256, 256, **BF16)).cuda()

    bare, model, scaling = make(), make(), recipe()
    source = watching(model)
    for step in range(4):
        source.begin(with_statistics=statistics)
        train(model, batch(step), scaling)
        source.read()
        train(bare, batch(step), scaling)
    x = batch(9)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        source.begin(with_statistics=statistics)
        train(model, x, scaling)
        assert source.read() is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    train(bare, x, scaling)
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
