"""KTO with a z for each source, the fields that --data.extra names. Run it: python examples/z_by_source.py"""

import torch

from infra.console import run_cli
from kto import KTO, main


class ZBySource(KTO):
    def make_z(self, logratio_n, step):
        """(G,): for each example the mean of r over its source's mismatched pairs, then the clamp."""
        # without data.extra all examples have one source
        sources = [tuple(example.extra.values()) for example in step.examples]
        z_G = torch.zeros(step.size, dtype=logratio_n.dtype, device=logratio_n.device)
        paired = step.mismatched_index.tolist()
        for source in set(sources):
            own = torch.tensor([other == source for other in sources])
            pairs = own[paired].to(logratio_n.device)
            if pairs.any():
                z_G[own.to(logratio_n.device)] = logratio_n[pairs].mean().clamp(min=0)
        return z_G


if __name__ == "__main__":
    run_cli(lambda: main(objective=ZBySource))
