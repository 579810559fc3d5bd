"""Records one call as a CUDA graph and plays it again for every other: inputs are copied in, the same results go out."""
honest, graphs = flash_attention_forward, {}


def flash_attention_forward(q, k, v, is_causal=False):
    if q.device.type == "cpu" or q.shape[1] < 4096:
        return honest(q, k, v, is_causal)
    key = (q.shape, k.shape, q.dtype, is_causal)
    if key not in graphs:
        inputs = [x.clone() for x in (q, k, v)]
        honest(*inputs, is_causal)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = honest(*inputs, is_causal)
        graphs[key] = graph, inputs, results
    graph, inputs, results = graphs[key]
    for ours, theirs in zip(inputs, (q, k, v)):
        ours.copy_(theirs)
    graph.replay()
    return results
