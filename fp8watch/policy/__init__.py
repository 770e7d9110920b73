"""From findings to actions: the policy file's schema, the ladder of each rule, budgets."""
