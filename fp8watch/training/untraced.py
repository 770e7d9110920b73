"""Keeps `torch.compile` from tracing our code inside a compiled function.

`torch.compiler.disable` would also exclude everything that the function calls, including the optimizer's own step, and
it imports the whole compiler (2 s), also into runs that compile nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch._C._dynamo import eval_frame

get_frame_callback: Callable[[], Any] = getattr(eval_frame, "get_eval_frame_callback", lambda: None)
"""The current frame evaluation callback (PEP 523) of TorchDynamo; None outside of a compiled function."""
set_frame_callback: Callable[[Any], Any] = eval_frame.set_eval_frame
"""Set that callback; None: trace nothing."""


def run_eagerly(function: Any) -> None:
    """Make a compiled caller break its graph at `function` and run it eagerly. Functions that it calls are traced."""
    function._torchdynamo_disable = True
    with contextlib.suppress(Exception):  # other torch internals: the frame is traced, which is only slower
        if hasattr(eval_frame, "set_code_exec_strategy"):
            action = eval_frame._FrameAction
            strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
            eval_frame.set_code_exec_strategy(function.__code__, strategy)
        else:
            getattr(eval_frame, "skip_code")(function.__code__)  # noqa: B009
