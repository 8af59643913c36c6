"""Tests run side by side, so threads that wait give up their core instead of spinning."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before llama.cpp is loaded
