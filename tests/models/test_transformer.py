import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.logprobs import next_token_logprobs, output_logprobs, pad, token_logprobs
from models.transformer import TinyTransformer, TransformerConfig, new_transformer

CONFIG = TransformerConfig(vocabulary_size=20, num_outputs=5, width=32, num_heads=2, max_length=24)


def trained_model(seed: int = 0) -> TinyTransformer:
    """A model whose outputs are not uniform."""
    model = new_transformer(CONFIG, seed)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(seed))
    return model.eval()


def test_a_new_model_is_uniform_over_what_it_can_say():
    logprobs = output_logprobs(new_transformer(CONFIG, seed=3), torch.tensor([[7, 8, 9]]))
    assert logprobs.shape == (1, 3, 5)
    assert torch.allclose(logprobs, torch.tensor(-math.log(5)))


def test_weights_depend_on_the_seed_alone_and_leave_the_global_generator_as_it_was():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one, other = new_transformer(CONFIG, seed=5), new_transformer(CONFIG, seed=5)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.tokens.weight, new_transformer(CONFIG, seed=6).tokens.weight)


def test_no_position_sees_what_follows_it():
    model = trained_model()
    ids = torch.randint(0, 20, (1, 10), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 6:] = (ids[0, 6:] + 1) % 20
    before, after = output_logprobs(model, ids), output_logprobs(model, changed)
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-6)
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-3)


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match="context of 25 tokens; this model takes 24"):
        output_logprobs(trained_model(), torch.zeros(1, 25, dtype=torch.long))


sequences = st.lists(st.lists(st.integers(0, 19), min_size=2, max_size=24), min_size=1, max_size=9)


@settings(max_examples=40, deadline=None)
@given(rows=sequences, seed=st.integers(0, 3))
def test_the_learner_recomputes_the_samplers_logprobs_whatever_the_batches_were(rows, seed):
    """One token sampled after each prefix, alone or in another batch, equals the learner's one pass to 1e-5."""
    model = trained_model(seed)
    rows = [[*row[:-1], row[-1] % CONFIG.num_outputs] for row in rows]
    with torch.inference_mode():
        sampled = [next_token_logprobs(model, [row[:-1]])[0, row[-1]].item() for row in rows]
        together = next_token_logprobs(model, [row[:-1] for row in rows])
        mask = torch.zeros_like(pad(rows), dtype=torch.bool)
        for index, row in enumerate(rows):
            mask[index, len(row) - 1] = True
        learnt, _ = token_logprobs(model, pad(rows), mask)
    for index, row in enumerate(rows):
        assert together[index, row[-1]].item() == pytest.approx(sampled[index], abs=1e-5)
        assert learnt[index, len(row) - 1].item() == pytest.approx(sampled[index], abs=1e-5)


def test_token_logprobs_are_zero_outside_the_mask_and_count_entropy_inside():
    model = new_transformer(CONFIG, seed=0)
    ids, mask = torch.tensor([[19, 2, 18, 4]]), torch.tensor([[False, True, False, True]])
    logprobs, entropy = token_logprobs(model, ids, mask)
    assert logprobs.tolist()[0] == pytest.approx([0, -math.log(5), 0, -math.log(5)])
    assert entropy.tolist()[0] == pytest.approx([0, math.log(5), 0, math.log(5)])
