"""Code of ours inside a function that `torch.compile` runs: not for the compiler to look at.

`torch.compiler.disable` does this too, but for all that the function calls, the optimizer's own step included, and at
the price of importing the whole compiler (2 s) into runs that compile nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch._C._dynamo import eval_frame

traced_by: Callable[[], Any] = getattr(eval_frame, "get_eval_frame_callback", lambda: None)
"""What looks at each Python frame that is about to run; None outside of what `torch.compile` runs."""
trace_by: Callable[[Any], Any] = eval_frame.set_eval_frame
"""Let it be looked at by that; None: by nothing."""


def leave_out(function: Any) -> None:
    """Have a compiled caller break its graph at this function and run it as it is; what it calls is looked at."""
    function._torchdynamo_disable = True
    with contextlib.suppress(Exception):  # a torch whose internals are others: the frame is traced, which only costs
        if hasattr(eval_frame, "set_code_exec_strategy"):
            action = eval_frame._FrameAction
            strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
            eval_frame.set_code_exec_strategy(function.__code__, strategy)
        else:
            getattr(eval_frame, "skip_code")(function.__code__)  # noqa: B009
