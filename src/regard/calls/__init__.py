"""The path of a call: its kind, its check, the choice of a backend, its run, and who is shown it.

Files are imported one by one: `jagged` needs `kinds`, and `dispatch` needs `jagged`."""
