"""The fused CPU engine's C++ sources (start at network.h) and their build."""
