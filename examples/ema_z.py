"""KTO with z as an exponential average over steps. Run it: python examples/ema_z.py"""

from infra.console import run_cli
from kto import KTO, main


class EMA(KTO):
    average = 0.0

    def make_z(self, logratio_n, step):
        return max(0.0, self.average)

    def after_step(self, step, columns, z):
        if len(z.mismatched_logratio_n):  # a step of one prompt alone has no mismatched pairs
            self.average += 0.1 * (z.mismatched_logratio_n.mean().item() - self.average)

    def state_dict(self):
        return {"average": self.average}


if __name__ == "__main__":
    run_cli(lambda: main(objective=EMA))
