"""Our cuTile kernels, one file a kernel family: kernel, launcher, custom op with a fake implementation and a gradient.

Each file's public function runs at once in eager mode and goes through its custom op (`torch.ops.kernelgraft.…`) where
torch traces or wants gradients. Tensors on a CPU run under the interpreter. Importing a kernel needs `cuda-tile`.
"""
