"""Each example's gradient, in factored form: how a model uses its parameters, watched through proxies."""
