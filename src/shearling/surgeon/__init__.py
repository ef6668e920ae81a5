"""Method `surgeon`: measure, order, allocate, refit. Label-free and one-shot; see docs/method.md."""
