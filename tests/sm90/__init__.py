"""Tests of the Hopper kernels (csrc/sm90)."""
