"""Each example's gradient of a parameter, in factored form: how long it is, how it is summed, and kernels for both."""
