"""What SGLang's documented storage interface looks like to a backend, and nothing else of it: the
abstract class, the loader of dynamic backends, what is published of the configuration. Written from
the interface, for tests where SGLang is not installed; `python -m tests.sglang` has the real one.
"""
