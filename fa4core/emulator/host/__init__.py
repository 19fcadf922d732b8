"""The host half of the emulator: CuTe DSL's own host code runs, and its launches arrive as values.

It knows the DSL's launch protocol, DLPack and torch; it knows neither kernels nor the machine.
"""
