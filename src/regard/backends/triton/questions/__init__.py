"""Questions about what was computed: kernels that walk over q and k once more."""
