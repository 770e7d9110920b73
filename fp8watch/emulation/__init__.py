"""FP8 delayed scaling on machines without FP8 hardware: real formats, real scales, slow arithmetic."""
