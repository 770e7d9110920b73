"""What casting a tensor to FP8 does to its elements: counts, error, crest factor; for sampled steps."""

from fp8watch.capture.statistics.count import COUNTS, Item, TensorStatistics, count, count_many

__all__ = ["COUNTS", "Item", "TensorStatistics", "count", "count_many"]
