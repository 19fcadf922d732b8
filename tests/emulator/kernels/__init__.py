"""CuTe DSL kernels written for the emulator's tests; none of them has to do with attention."""
