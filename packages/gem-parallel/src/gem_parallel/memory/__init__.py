"""What is kept between forward and backward: recomputed, quantised or sent to the host, region by region."""
