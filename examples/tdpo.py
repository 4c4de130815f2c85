"""TDPO (arXiv 2404.11999): DPO with the KL to the reference at each token. Run it: python examples/tdpo.py"""

import sys
from dataclasses import dataclass, field

sys.path.append(f"{sys.path[0]}/..")  # the project, wherever this file is started from

from torch.nn.functional import logsigmoid

from dpo import DPO, DPOSettings, main
from runs.errors import run_cli
from runs.settings import RunSettings, setting


@dataclass(frozen=True)
class TDPOSettings(DPOSettings):
    alpha: float = setting(0.5, at_least=0)
    """Weight of the KL at the rejected completion's tokens minus that at the chosen one's."""


@dataclass(frozen=True)
class Settings(RunSettings):
    dpo: TDPOSettings = field(default_factory=TDPOSettings)


class TDPO(DPO):
    by_token = vocabulary_kl = True

    def loss(self, logps, ref_logps, batch, z):
        """TDPO2: the KL of the chosen completion takes part as a number, without gradient."""
        _, columns = super().loss(logps, ref_logps, batch, z)
        kl_BK = batch.vocabulary_kl.sum(-1)
        delta_B = kl_BK[:, 1] - kl_BK[:, 0].detach()
        h_B = (logps - ref_logps) @ logps.new_tensor([1.0, -1.0])
        loss_B = -logsigmoid(self.args.beta * (h_B - self.args.alpha * delta_B))
        return loss_B, columns | {"kl/chosen": kl_BK[:, 0], "kl/rejected": kl_BK[:, 1]}


if __name__ == "__main__":
    run_cli(lambda: main(objective=TDPO, settings=Settings))
