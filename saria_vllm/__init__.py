"""SARIA: a KV-cache tier for vLLM that serves multi-turn LLM agents from DRAM and SSD."""

__version__ = "0.1.0"
