"""`DLPackView` in JAX and PyTorch: the same bytes, kept alive while an array uses them."""

import ctypes
import gc
import mmap
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from slipstream.tensors import dlpack
from slipstream.tensors.dlpack import DLPackView


class Owner:
    """A page of memory that numpy's views keep."""

    def __init__(self):
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.memory = memory
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (mmap.PAGESIZE,),
            "typestr": "|u1",
            "version": 3,
        }


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (4, 3), (2, 1, 5)])
def test_both_see_the_same_memory(dtype, shape):
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    view = np.asarray(Owner())[256 : 256 + count * kind.itemsize].view(kind).reshape(shape)
    view[...] = np.arange(count).reshape(shape)
    leaf, tensor = jax.dlpack.from_dlpack(DLPackView(view)), torch.from_dlpack(DLPackView(view))
    assert leaf.unsafe_buffer_pointer() == tensor.data_ptr() == DLPackView(view).address == view.ctypes.data
    assert leaf.shape == tuple(tensor.shape) == shape and leaf.dtype == kind
    assert str(tensor.dtype) == f"torch.{kind.name}"
    tensor += 1
    np.testing.assert_array_equal(np.asarray(leaf, np.float32), np.arange(1, count + 1).reshape(shape))
    np.testing.assert_array_equal(np.asarray(jnp.copy(leaf)), view)


def test_only_arrays_keep_the_memory_alive():
    owner = Owner()
    gone = weakref.ref(owner)
    view = np.asarray(owner)[:64].view(np.float32)
    del owner
    before = len(dlpack._exported)
    leaf, tensor = jax.dlpack.from_dlpack(DLPackView(view)), torch.from_dlpack(DLPackView(view))
    del view
    gc.collect()
    assert len(dlpack._exported) == before + 2 and gone() is not None
    leaf.delete()
    del leaf
    gc.collect()
    assert len(dlpack._exported) == before + 1 and gone() is not None
    parameter = torch.nn.Parameter(torch.zeros(16))
    parameter.data = tensor
    del tensor
    gc.collect()
    assert gone() is not None
    del parameter
    gc.collect()
    assert len(dlpack._exported) == before and gone() is None


def test_a_strided_view_is_refused():
    with pytest.raises(ValueError, match=r"needs a contiguous array, got strides \(32, 8\)"):
        DLPackView(np.zeros((4, 4))[:, 1:])


AT_EXIT = """
import jax, numpy as np, torch
from slipstream.tensors.dlpack import DLPackView
jax.numpy.zeros(1)
leaf = jax.dlpack.from_dlpack(DLPackView(np.zeros(4096, np.float32)[: 1024]))
tensor = torch.from_dlpack(DLPackView(np.zeros(1024, np.float32)))
tensor.myself = tensor  # a cycle, so it survives until interpreter shutdown
torch.kept, jax.kept = tensor, leaf
print("end")
"""


def test_arrays_may_outlive_the_interpreter():
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
