"""On PYTHONPATH, makes vLLM compute something else than its weights say: its RMSNorm gets a large epsilon."""

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

NAME = "vllm.model_executor.layers.layernorm"


class Patch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def patched(module):
            execute(module)
            init = module.RMSNorm.__init__
            module.RMSNorm.__init__ = lambda self, size, eps=1e-6, *rest, **named: init(self, size, 0.3, *rest, **named)

        spec.loader.exec_module = patched
        return spec


sys.meta_path.insert(0, Patch())
