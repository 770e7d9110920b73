"""`attach(..., also=)`: a rollback brings back what is neither model nor optimizer."""

from __future__ import annotations

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from watched_training import Trainer, command

import fp8watch
from fp8watch.errors import Refused
from fp8watch.records import CommandResult


def train(trainer: Trainer, watch: fp8watch.Watch, ema: AveragedModel, steps: int, bad: int = 0) -> None:
    for _ in range(steps):
        loss = trainer.loss()
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        if watch.global_step + 1 == bad and watch.attempt == 0:
            with torch.no_grad():
                trainer.model[0].weight[0, 0] = float("nan")
        ema.update_parameters(trainer.model)
        watch.step(loss)


def finite(ema: AveragedModel) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in ema.parameters())


@pytest.mark.parametrize("is_given", [True, False])
def test_an_average_that_was_given_is_sound_after_a_rollback(tmp_path, channel, is_given):
    trainer = Trainer(fp8=False)
    ema = AveragedModel(trainer.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    watch = fp8watch.attach(
        trainer.model, trainer.optimizer, policy="auto", run="r", also={"ema": ema} if is_given else None,
        checkpoints=fp8watch.Checkpoints(tmp_path / "ckpt", every=4),
    )  # fmt: skip
    train(trainer, watch, ema, 7, bad=6)
    assert not finite(ema)
    channel().replies.append(command("rollback", params={"onset_step": 6, "allow_without_data": True}))
    train(trainer, watch, ema, 4)
    assert [r.readback for r in channel().of(CommandResult)][-1] == "ok"
    assert all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())
    assert finite(ema) == is_given
    assert int(ema.n_averaged) == (4 + 3 if is_given else 7 + 4)


def test_the_same_objects_under_the_same_names_are_the_same_argument(trainer, channel):
    ema = AveragedModel(trainer.model)
    watch = fp8watch.attach(trainer.model, trainer.optimizer, also={"ema": ema})
    assert fp8watch.attach(trainer.model, trainer.optimizer, also={"ema": ema}) is watch
    with pytest.raises(ValueError, match="also"):
        fp8watch.attach(trainer.model, trainer.optimizer, also={"ema": AveragedModel(trainer.model)})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1], "a mapping from names"),
        ({1: torch.nn.Linear(1, 1)}, "a mapping from names"),
        ({"ema": torch.zeros(1)}, r"ema: Tensor has no state_dict\(\) and no load_state_dict\(\)"),
        ({"ema": AveragedModel}, "ema: the class AveragedModel itself has no state"),
    ],
)
def test_what_has_no_state_is_refused_by_name(trainer, channel, given, said):
    with pytest.raises(Refused, match=said):
        fp8watch.attach(trainer.model, trainer.optimizer, also=given)
