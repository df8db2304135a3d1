"""C++ kernels behind one small module, with a NumPy twin used as oracle."""
