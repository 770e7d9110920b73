"""Where runs are stored: one small interface (`base.Store`) with several engines behind it."""
