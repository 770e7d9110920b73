"""Where runs are kept: one seam of few methods, several engines behind it."""
