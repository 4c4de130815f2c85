"""A reward model rates the answers of online KTO: thumbs up above a threshold, or above the median of an iteration.

    python examples/reward_model.py --reward.model FOLDER --data.extra dialogue

FOLDER, or an id of the Hub, is a model for sequence classification with one score and its own chat template. It
gets the messages of the record and the answer's text, not the policy's tokens; the thoughts of a policy that thinks are
a part of its answer. The first process runs it, on the policy's device. Scores are in `rewards` of
iterations/rated-N.jsonl. The accuracy before and after is the mean of sigmoid(score - threshold): how likely an answer
is better than one at the threshold, by Bradley and Terry. If the threshold is the median, it is the mean of
sigmoid(score).
"""

import json
import math
import statistics
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

import online
from evaluation import Answer, as_answers, with_answers
from infra.console import advance, progress, run_cli, user_error
from infra.settings import refuse_unless, split_commas
from models.hub import find_model
from records.forms import Record, as_turns, understand_record
from records.template import ChatTemplate
from records.tokenizer import load_tokenizer
from trainer import Trainer


@dataclass(frozen=True)
class RewardSettings:
    model: str
    """The reward model: a folder with safetensors, or an id of the Hub."""
    threshold: float | Literal["median"] = 0.0
    """An answer above it is right. median: above the iteration's median."""


@dataclass(frozen=True, kw_only=True)
class Settings(online.Settings):
    reward: RewardSettings

    def validate(self) -> None:
        super().validate()
        has_dialogue = "dialogue" in split_commas(self.data.extra)
        refuse_unless(has_dialogue, "data.extra: add dialogue, the messages for the reward model")
        refuse_unless(self.online.cut == "judge", "online.cut: the reward model judges all answers")


def with_dialogue(raw: dict) -> list[dict]:
    """The record with its prompt's messages in one more field, as text."""
    record = understand_record(raw, "prompts")
    refuse_unless(not record.tools, "tools: the reward model does not read them")
    return [{**raw, "dialogue": json.dumps(as_turns(record.prompt))}]


class RewardModel:
    """The checker, and what rate asks. `load` says which model."""

    def load(self, args: RewardSettings, device: torch.device, date: str | None = None) -> None:
        """date: the run's day, for a chat template that prints one. Raises BadInput."""
        self.threshold = 0.0 if args.threshold == "median" else args.threshold
        source = find_model(args.model, "reward.model")
        options = dict(trust_remote_code=False, use_safetensors=True, output_loading_info=True)
        # transformers' default attention leaves the softcap of Gemma 2 out
        options |= dict(attn_implementation="eager")
        with user_error("reward.model", args.model):
            self.tokenizer = load_tokenizer(source.tokenizer)
            model, info = AutoModelForSequenceClassification.from_pretrained(
                source.folder, **options
            )
        missing = ", ".join(sorted(info["missing_keys"]))
        refuse_unless(not missing, f"reward.model: {args.model}: no weights of {missing}")
        refuse_unless(model.num_labels == 1, f"reward.model: {model.num_labels} scores, not one")
        refuse_unless(self.tokenizer.chat_template, "reward.model: it has no chat template")
        self.write = ChatTemplate(self.tokenizer, date, {}).writer(Record([], []))
        config = model.config.get_text_config()
        self.longest = getattr(config, "max_position_embeddings", math.inf)
        self.model = model.to(device).eval()

    @torch.no_grad()
    def scores(self, answers: list[Answer]) -> list[float]:
        """Raises BadInput for a dialogue that is too long, and for a score that is no number."""
        scores = []
        with progress("scoring", len(answers)):
            for i, answer in enumerate(answers):
                ids = self.encode(answer)
                n = ids.shape[1]
                refuse_unless(
                    n <= self.longest,
                    f"reward.model: answer {i}: {n:,} tokens with its prompt, and the model reads "
                    f"{self.longest:,}: a smaller data.max_completion, or shorter prompts",
                )
                # one at a time: the rounding of a score does not depend on the others
                score = self.model(ids.to(self.model.device)).logits.item()
                refuse_unless(
                    math.isfinite(score), f"reward.model: answer {i}: its score is {score}"
                )
                scores.append(score)
                advance()
        return scores

    def encode(self, answer: Answer) -> Tensor:
        """The token ids (1, N) of the dialogue with this answer."""
        turns = json.loads(answer.fields["dialogue"])
        completion = {"role": "assistant", "content": answer.completion}
        with user_error("reward.model: chat template"):
            text = self.write([*turns, completion])
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    def __call__(self, answers: list[Answer]) -> list[float]:
        scores = torch.tensor(self.scores(answers), dtype=torch.float64)
        return torch.sigmoid(scores - self.threshold).tolist()


reward_model = RewardModel()


class Rewarded(Trainer):
    def __init__(self, run):
        super().__init__(run)
        if run.fabric.global_rank == 0:
            reward_model.load(run.cfg.reward, run.fabric.device, run.cfg.data.date)


def rate(run, prompts, answers):
    answered = with_answers(prompts, answers)
    scores = reward_model.scores(as_answers(run.tokenizer, answered, run.cfg.online.stop))
    threshold = run.cfg.reward.threshold
    if threshold == "median":
        threshold = statistics.median(scores)
    return [
        e._replace(label=score > threshold, rewards=(score, None))
        for e, score in zip(answered, scores)
    ]


if __name__ == "__main__":
    given = dict(trainer=Rewarded, rate=rate, checker=reward_model, make_records=with_dialogue)
    run_cli(lambda: online.main(settings=Settings, **given))
