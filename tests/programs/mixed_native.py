"""Runs a program in which rank 1 has no native code: `mixed_native.py program.py ARGS`."""
import os
import runpy
import sys

if os.environ["RANK"] == "1":
    os.environ["GLOBALTENSOR_NATIVE"] = "0"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
