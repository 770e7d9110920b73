"""Between the user's loop and the parts below: attach, the step boundary, the guard that lets nothing out.

`attachment` checks the arguments, `assemble` builds the parts, `watch` is what the loop calls, `session` what they
share. `recorder` and `stepping` stand around the optimizer step, `boundary` carries commands out, `data` is a loader
whose position a rollback can restore.
"""
