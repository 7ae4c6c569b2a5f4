x2.o: fused_amax_quantize.cpp /tmp/ccBkDJ4d.s
