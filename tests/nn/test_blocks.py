import pytest
import torch
from torch.testing import assert_close

from regard import masks, nn


def test_encoder_block_is_pre_norm():
    block = nn.EncoderBlock(16, 2).double()
    x = torch.randn(2, 5, 16).double()
    y = x + block.attention(block.attention_norm(x), mask=masks.causal())
    y = y + block.network(block.network_norm(y))
    assert_close(block(x, mask=masks.causal()), y)


def test_decoder_block_is_pre_norm():
    block = nn.DecoderBlock(16, 2, memory_width=12).double()
    x, memory = torch.randn(2, 5, 16).double(), torch.randn(2, 7, 12).double()
    y = x + block.own(block.own_norm(x), mask=masks.causal())
    y = y + block.memory(block.memory_norm(y), memory, mask=masks.padding([7, 3]))
    y = y + block.network(block.network_norm(y))
    assert_close(block(x, memory, memory_mask=masks.padding([7, 3])), y)


def test_blocks_decode_with_a_cache():
    encoder = nn.EncoderBlock(16, 4, kv_heads=2, rotary=nn.Rotary(), qk_norm=True).double()
    decoder = nn.DecoderBlock(16, 4, rotary=nn.Rotary(), bias=True).double()
    x, memory = torch.randn(1, 6, 16).double(), torch.randn(1, 4, 16).double()
    cache, other = nn.Cache(), nn.Cache()
    steps = x.split(1, dim=1)
    first = [encoder(step, mask=masks.causal(), cache=cache) for step in steps]
    second = [decoder(step, memory, cache=other) for step in steps]
    assert_close(torch.cat(first, 1), encoder(x, mask=masks.causal()))
    assert_close(torch.cat(second, 1), decoder(x, memory))


def test_traces_come_with_the_same_output():
    encoder, decoder = nn.EncoderBlock(16, 2), nn.DecoderBlock(16, 2)
    x, memory = torch.randn(1, 6, 16), torch.randn(1, 4, 16)
    y, seen = encoder(x, trace=True)
    assert_close(y, encoder(x), atol=1e-5, rtol=1e-5)
    assert seen.weights().shape == (1, 2, 6, 6)
    y, (own, read) = decoder(x, memory, trace=True)
    assert_close(y, decoder(x, memory), atol=1e-5, rtol=1e-5)
    assert own.weights().shape == (1, 2, 6, 6)
    assert read.weights().shape == (1, 2, 6, 4)


def test_a_decoder_block_does_not_see_the_future_unless_told():
    block = nn.DecoderBlock(16, 2).eval()
    x, memory = torch.randn(1, 6, 16), torch.randn(1, 4, 16)
    changed = x.clone()
    changed[:, -1] = torch.randn(16)
    assert_close(block(changed, memory)[:, :-1], block(x, memory)[:, :-1])
    whole = block(changed, memory, mask=None)[:, :-1]
    assert not torch.allclose(whole, block(x, memory, mask=None)[:, :-1])


def test_dropout_only_in_training():
    block = nn.EncoderBlock(16, 2, dropout=0.5)
    x = torch.randn(1, 6, 16)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_width_of_the_network():
    assert nn.EncoderBlock(16, 2).network[0].out_features == 64
    assert nn.EncoderBlock(16, 2, hidden=20).network[0].out_features == 20


@pytest.mark.compiled
def test_blocks_compile_as_one_graph():
    encoder, decoder = nn.EncoderBlock(16, 2, rotary=nn.Rotary()), nn.DecoderBlock(16, 2)
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 4, 16)
    run = torch.compile(encoder, fullgraph=True, backend="eager")
    assert_close(run(x, mask=masks.causal()), encoder(x, mask=masks.causal()))
    run = torch.compile(decoder, fullgraph=True, backend="eager")
    assert_close(run(x, memory), decoder(x, memory))
