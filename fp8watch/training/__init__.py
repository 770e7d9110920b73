"""The interface to the user's training loop: attach, the step boundary, and the guard that keeps exceptions inside.

`attachment` checks the arguments and `assemble` builds the parts. The loop calls `watch`; the parts share a `session`.
`stepping` wraps the optimizer step for `recorder`, `boundary` carries commands out, and `data` wraps a loader so that a
rollback can restore its position.
"""
