"""KTO on half of a completion's tokens: those with the log-ratios farthest from 0. Run it: python
examples/token_kto.py"""

from infra.console import run_cli
from kto import KTO, main


class TokenKTO(KTO):
    by_token = True

    def reduce_tokens(self, logps, ref_logps, length_BK):
        """(B, K, L) -> (B, K) sums over the chosen tokens; loss and z are made of these."""
        # Beyond a completion's end both are 0. stable: before the first update all log-ratios are 0,
        # and the first tokens are chosen, whatever the micro-batch is padded to.
        logratio = (logps - ref_logps).detach().abs()
        order = logratio.argsort(dim=-1, descending=True, stable=True)
        is_chosen = order.argsort(dim=-1) < (length_BK[..., None] + 1) // 2
        return (logps * is_chosen).sum(-1), (ref_logps * is_chosen).sum(-1)


if __name__ == "__main__":
    run_cli(lambda: main(objective=TokenKTO))
