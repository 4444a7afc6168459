"""Typed configuration: what can be said (`schema`), where it comes from (`load`), what does not fit together (`constraints`)."""

from mtmegatron.config.constraints import check, faults
from mtmegatron.config.load import Loaded, load
from mtmegatron.config.schema import Config

__all__ = ["Config", "Loaded", "check", "faults", "load"]
