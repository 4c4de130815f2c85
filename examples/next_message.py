"""Learn from the user's next message instead of a thumb (arXiv 2603.12273).

    python examples/next_message.py --data.train FILE --data.val FILE --data.extra next

A record is a prompt, a completion and `next`, the user's next message (python -m convert writes it).
The policy scores the completion twice: after the prompt, and after the prompt with the next message. If the next
message makes a token less probable, the policy learns to make the token less probable, and the other way round.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jsonargparse.typing import PositiveFloat

import kto
from infra.console import run_cli
from infra.settings import RunSettings
from objective import Objective
from packing import pack
from records.forms import understand_record
from trainer import Trainer


@dataclass(frozen=True)
class NextMessageSettings:
    max_advantage: PositiveFloat = 5.0
    """The most that the next message may count at a token, in nats."""


@dataclass(frozen=True)
class Settings(RunSettings):
    kto: NextMessageSettings = NextMessageSettings()


def without_thumb(record: dict) -> list[dict]:
    """Records without a next message are dropped."""
    fields = {name: value for name, value in record.items() if name != "label"}
    return [fields] if record.get("next") else []


def with_next(prompt: str | list, message: str) -> str | list:
    """The prompt (a text or messages) with the user's next message in it."""
    hint = f"(My next message will be: {message})"
    if isinstance(prompt, str):
        return f"{hint}\n{prompt}"
    *before, last = prompt
    return [*before, last | {"content": f"{last['content']}\n\n{hint}"}]


def prompt_ids(tokenizer, asked: dict) -> np.ndarray:
    """The token ids of a prompt. asked: its fields in a record."""
    by_template = not isinstance(asked["prompt"], str)
    record = understand_record(asked | {"completion": "."}, "demonstrations")
    texts = tokenizer.render(record, by_template)
    ((ids, _),) = tokenizer.encode_all([texts], by_template)
    return np.array(ids, np.int32)


class NextMessage(Objective):
    record_kind = "demonstrations"
    needs_reference = False
    by_token = True
    logps_with_next = None  # (B, 1, L) of the micro-batch, set by WithNext

    def __init__(self, args):
        self.args = args

    def loss(self, logps, ref_logps, batch, z_B):
        limit = self.args.max_advantage
        advantage = (self.logps_with_next - logps.detach()).clamp(-limit, limit)
        length_B = batch.length[:, 0]
        # beyond the end of a completion all log-probs are 0
        loss_B = -(advantage * logps)[:, 0].sum(1) / length_B
        return loss_B, {"advantage": advantage[:, 0].sum(1) / length_B}


class WithNext(Trainer):
    def micro_batch_loss(self, micro, *rest):
        prompts = []
        for example, message in zip(micro.examples, micro.extra("next")):
            asked = example.asked | {"prompt": with_next(example.asked["prompt"], message)}
            prompts.append(prompt_ids(self.run.tokenizer, asked))
        completions = [example.completions for example in micro.examples]
        packed = pack(prompts, completions, micro.step.longest).to(self.run.fabric.device)
        with torch.no_grad():
            self.run.objective.logps_with_next = self.forward(packed).logps
        return super().micro_batch_loss(micro, *rest)


if __name__ == "__main__":
    handed = dict(objective=NextMessage, settings=Settings, trainer=WithNext)
    run_cli(lambda: kto.main(make_records=without_thumb, **handed))
