import asyncio
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.checkpoint import save_checkpoint
from models.logprobs import next_token_logprobs, prefix_sha256
from models.tokenizer import Vocabulary
from models.transformer import TransformerConfig, new_transformer
from rollout.errors import PolicyError
from rollout.port import Context
from rollout.torch_policy import draw, full_prompt
from schemas.events import Observation
from schemas.records import PolicyVersion


def biased(policy, seed=1):
    """The policy with outputs that are not uniform."""
    torch.nn.init.normal_(policy._loaded.model.head.weight, generator=torch.Generator().manual_seed(seed))
    return policy


def context_of(task, seed, calls=(), texts=("layer 0: radix 64",)):
    return Context(
        trajectory_id=f"t{seed}",
        attempt=0,
        task=task,
        observations=tuple(Observation(content=text) for text in texts),
        calls=tuple(calls),
        seed=seed,
    )


async def act_all(policy, contexts):
    stop = asyncio.Event()
    return await asyncio.gather(*(policy.act(context, None, stop) for context in contexts))


def test_what_is_sampled_depends_on_the_seed_and_not_on_the_batch(unwrap, new_policy):
    task = unwrap.tasks("train")[0]
    contexts = [context_of(task, seed, texts=("layer 0: radix 64" + " done" * (seed % 7),)) for seed in range(40)]
    together = asyncio.run(act_all(biased(new_policy()), contexts))
    small = asyncio.run(act_all(biased(new_policy(max_batch=3)), contexts))
    alone = [asyncio.run(act_all(biased(new_policy(batch_wait_ms=0)), [context]))[0] for context in contexts]
    names = [move.action.name for move in together]
    assert names == [move.action.name for move in small] == [move.action.name for move in alone]
    assert len(set(names)) > 3
    for one, other in zip(together, alone, strict=True):
        assert one.call.logprobs == pytest.approx(other.call.logprobs, abs=1e-5)


def test_a_call_holds_the_delta_and_proves_the_whole_prompt(unwrap, new_policy):
    policy, task = biased(new_policy()), unwrap.tasks("train")[0]
    first = asyncio.run(act_all(policy, [context_of(task, 7)]))[0]
    texts = ("layer 0: radix 64", "done\nlayer 1: radix 16")
    second = asyncio.run(act_all(policy, [context_of(task, 7, [first.call], texts)]))[0]
    assert second.call.parent_call_id == first.call.call_id
    assert second.call.prompt_token_ids == policy.encode(Observation(content=texts[1]))
    prompt = full_prompt((first.call,)) + second.call.prompt_token_ids
    assert second.call.prefix_sha256 == prefix_sha256(prompt)
    with torch.inference_mode():
        expected = next_token_logprobs(policy._loaded.model, [prompt])[0, second.call.response_token_ids[0]]
    assert second.call.logprobs == pytest.approx([expected.item()], abs=1e-5)
    assert (second.call.logprobs_mode, second.call.sampled_run_lengths) == ("raw", [1])
    assert second.call.policy_version_runs == [(0, 1)]


def test_temperature_softens_and_zero_takes_the_likeliest(unwrap, new_policy):
    task, context = unwrap.tasks("train")[0], None
    context = context_of(task, 3)
    warm, cold = biased(new_policy(temperature=2.0)), biased(new_policy(temperature=0.0))
    with torch.inference_mode():
        raw = next_token_logprobs(
            warm._loaded.model, [[warm._tokenizer.begin_id, *warm.encode(context.observations[0])]]
        )
    softened = torch.log_softmax(raw / 2, -1)[0]
    move = asyncio.run(act_all(warm, [context]))[0]
    assert move.call.logprobs_mode == "processed"
    assert move.call.logprobs == pytest.approx([softened[move.call.response_token_ids[0]].item()], abs=1e-5)
    likeliest = asyncio.run(act_all(cold, [context]))[0]
    assert likeliest.call.response_token_ids == [int(raw.argmax())]
    assert likeliest.call.logprobs == pytest.approx([raw.max().item()], abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-20, 5), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_cumulative_distribution(logits, uniform):
    logprobs = torch.log_softmax(torch.tensor([logits]), -1)
    token = int(draw(logprobs, [uniform]))
    below = logprobs.exp().double()[0, :token].sum().item()
    upto = logprobs.exp().double()[0, : token + 1].sum().item()
    assert below - 1e-6 <= uniform <= upto + 1e-6


def test_draw_frequencies_follow_the_probabilities():
    logprobs = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(4000, 3)
    tokens = draw(logprobs, [n / 4000 for n in range(4000)])
    assert torch.bincount(tokens).tolist() == [2000, 1000, 1000]


def test_a_published_version_is_loaded_and_named_in_the_next_call(unwrap, new_policy, tmp_path):
    policy = new_policy()
    saved = save_checkpoint(tmp_path / "p.safetensors", biased(new_policy(seed=9))._loaded.model, unwrap.vocabulary)
    version = PolicyVersion(policy_id="policy-0", version=4, checkpoint_uri=saved.uri, sha256=saved.sha256)
    asyncio.run(policy.load(version))
    move = asyncio.run(act_all(policy, [context_of(unwrap.tasks("train")[0], 1)]))[0]
    assert policy.version == 4
    assert move.call.policy_version_runs == [(4, 1)]
    assert move.call.logprobs != pytest.approx([-math.log(8)])


def test_a_version_that_cant_be_used_is_refused_and_the_old_one_stays(unwrap, new_policy, tmp_path):
    policy = new_policy()
    saved = save_checkpoint(tmp_path / "p.safetensors", new_policy()._loaded.model, unwrap.vocabulary)
    wrong_digest = PolicyVersion(policy_id="policy-0", version=1, checkpoint_uri=saved.uri, sha256="0" * 64)
    with pytest.raises(PolicyError, match="the file was changed"):
        asyncio.run(policy.load(wrong_digest))
    other = Vocabulary(outputs=("x",), inputs=())
    model = new_transformer(TransformerConfig(vocabulary_size=3, num_outputs=1, width=16), 0)
    saved = save_checkpoint(tmp_path / "q.safetensors", model, other)
    with pytest.raises(PolicyError, match="plays another domain"):
        asyncio.run(policy.load(PolicyVersion(policy_id="p", version=1, checkpoint_uri=saved.uri, sha256=saved.sha256)))
    assert policy.version == 0


def test_a_context_that_outgrew_the_model_fails_by_name_and_alone(unwrap, new_policy):
    task = unwrap.tasks("train")[0]
    contexts = [context_of(task, 1), context_of(task, 2, texts=("done " * 80,))]

    async def both():
        stop, policy = asyncio.Event(), new_policy()
        return await asyncio.gather(*(policy.act(c, None, stop) for c in contexts), return_exceptions=True)

    fine, failed = asyncio.run(both())
    assert fine.action.name in unwrap.vocabulary.outputs
    assert isinstance(failed, PolicyError)
    assert "context of 81 tokens; the model takes 64" in str(failed)
