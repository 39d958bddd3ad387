"""``import megatron_real.auto`` as a script's first line is the same as starting it with ``-m megatron_real``."""

from megatron_real.hooks.install import install

__all__: list[str] = []

install()
