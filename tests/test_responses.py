from dclightning.data.problems import Problem
from dclightning.models import load_tokenizer
from dclightning.rollout.responses import encode_prompt
from tests.helpers import TINY

PROBLEM = Problem("a", "What is 1 + 1?", "2")


def test_a_prompt_goes_through_the_chat_template_with_its_options():
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if enable_thinking is false %}=!{% endif %}"
    )

    def text(**options):
        return tokenizer.decode(encode_prompt(tokenizer, PROBLEM, **options))

    assert text() == "<user>What is 1 + 1?"
    assert text(system_prompt="x") == "<system>x<user>What is 1 + 1?"
    assert text(template="{problem} = {problem}") == "<user>What is 1 + 1? = What is 1 + 1?"
    assert text(options={"enable_thinking": False}) == "<user>What is 1 + 1?=!"


def test_a_prompt_without_a_chat_template_is_plain_text():
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_prompt(tokenizer, PROBLEM)) == "What is 1 + 1?"
    assert tokenizer.decode(encode_prompt(tokenizer, PROBLEM, system_prompt="1+1")) == "1+1\nWhat is 1 + 1?"
