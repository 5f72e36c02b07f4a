"""What pyproject.toml cannot say: the native extension will be declared here."""

from setuptools import setup

setup()
