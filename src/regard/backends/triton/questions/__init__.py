"""Questions about what was computed: kernels that go over q and k once more."""
