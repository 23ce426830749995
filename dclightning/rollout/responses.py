"""Problems asked, responses sampled, decoded and scored: what training and evaluation have in common."""

from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError

from dclightning.data.problems import Problem
from dclightning.errors import UserError
from dclightning.phases import phases
from dclightning.rewards.scoring import Scorer
from dclightning.rollout.engine import RolloutEngine
from dclightning.rollout.types import Completion, Sampling, Scores
from dclightning.seeds import seed_all


def encode_prompt(
    tokenizer: Any,
    problem: Problem,
    system_prompt: str | None = None,
    template: str = "{problem}",
    options: dict[str, Any] | None = None,
) -> list[int]:
    """The token ids that a problem is asked with, through the chat template if the tokenizer has one.

    Args:
        tokenizer: The policy's.
        problem: What is asked.
        system_prompt: Goes before it as a system message.
        template: Turns the problem into the user's message; ``{problem}`` stands for it.
        options: What the chat template takes besides, such as ``enable_thinking``.
    """
    text = template.replace("{problem}", problem.problem)
    if tokenizer.chat_template is None:
        encoded = tokenizer(f"{system_prompt}\n{text}" if system_prompt else text)
    else:
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages.append({"role": "user", "content": text})
        try:
            encoded = tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True, **(options or {})})
        except TemplateError as error:
            raise UserError(
                f"chat template: {error}; are system_prompt and chat_template_options what it takes?"
            ) from error
    return list(encoded["input_ids"])


def respond(
    engine: RolloutEngine,
    tokenizer: Any,
    problems: Sequence[Problem],
    prompts: list[list[int]],
    scorer: Scorer,
    sampling: Sampling,
    samples: int,
    seed: int,
    told: Callable[[int], None] = lambda count: None,
) -> tuple[list[Completion], Scores]:
    """Sample and score ``samples`` responses to each problem, those to a problem side by side.

    Args:
        engine: Samples.
        tokenizer: Decodes.
        problems: What is asked.
        prompts: The token ids that each is asked with.
        scorer: Scores.
        sampling: How responses are drawn.
        samples: Responses to a problem.
        seed: All that is random follows from it.
        told: Is told of how many more responses are finished.
    """
    # Rewards and callbacks may use the global generators: from here on they, too, depend on the seed alone, but for
    # async rewards, which run while the engine draws.
    seed_all(seed)

    left = set(range(len(problems)))

    def finished(place: int, group: list[Completion]) -> None:
        left.discard(place)
        texts = tokenizer.batch_decode([c.token_ids for c in group], skip_special_tokens=True)
        for completion, text in zip(group, texts, strict=True):
            completion.text = text
        scorer.begin(place, problems[place], group)
        told(len(group))

    with phases("rollout"):
        try:
            completions = engine.generate(prompts, sampling, samples, seed, finished)
        except BaseException:
            scorer.abandon()
            raise
        for place in sorted(left):  # of which the engine did not tell
            finished(place, completions[place * samples : (place + 1) * samples])
    with phases("reward"):
        scores = scorer.finish([problem for problem in problems for _ in range(samples)], completions)
    return completions, scores
