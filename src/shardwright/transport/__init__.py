"""Moving tensors and Python values between ranks."""
