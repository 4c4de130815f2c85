"""TR-KTO (arXiv 2404.09656): the reference moves towards the policy. Run it: python examples/tr_kto.py"""

import sys
from dataclasses import dataclass, field

sys.path.append(f"{sys.path[0]}/..")  # the project, wherever this file is started from

import kto
from runs.errors import run_cli
from runs.settings import setting


@dataclass(frozen=True)
class TRSettings(kto.KTOSettings):
    alpha: float = setting(0.6, above=0, at_most=1)
    """The reference becomes alpha * policy + (1 - alpha) * reference; 1: the policy as it is then."""
    interval: int = setting(50, at_least=1)
    """Steps from one such update to the next."""


@dataclass(frozen=True)
class Settings(kto.Settings):
    kto: TRSettings = field(default_factory=TRSettings)


class TRKTO(kto.KTO):
    def reference_share(self, step):
        return self.args.alpha if step % self.args.interval == 0 else 0.0


if __name__ == "__main__":
    run_cli(lambda: kto.main(objective=TRKTO, settings=Settings))
