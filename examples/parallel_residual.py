"""A GPT with parallel residual: attention and MLP read the same input. Run it: python examples/parallel_residual.py"""

from head import autocast
from infra.console import run_cli
from kto import main
from model import GPT, Block


class ParallelBlock(Block):
    def forward(self, x_RQC, cos_RQD, sin_RQD, attention):
        """x_RQC: rows of Q tokens. cos_RQD, sin_RQD: of their rotary positions. attention: who attends to whom."""
        # autocast: as in Block, once for all linear layers that read a norm
        from_attention = self.attn(autocast(self.norm_1(x_RQC)), cos_RQD, sin_RQD, attention)
        return x_RQC + from_attention + self.mlp(autocast(self.norm_2(x_RQC)))


GPT.block_class = ParallelBlock  # for every model of this process: policy and reference


if __name__ == "__main__":
    run_cli(main)
