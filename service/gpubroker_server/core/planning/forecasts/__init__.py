"""Forecasts of the starts of waiting tasks, and the reservations for them."""
