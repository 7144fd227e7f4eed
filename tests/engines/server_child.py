"""vLLM's OpenAI-compatible server, as `python -m vllm.entrypoints.openai.api_server` runs it."""

from __future__ import annotations

import runpy

MODULE = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Takes the arguments of vLLM's."""
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
