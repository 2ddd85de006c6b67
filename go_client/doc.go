// Package weightbus receives a model's weights from a trainer, version by version, and applies
// them in place: whole, verified and acknowledged. It speaks WBP/1 (docs/PROTOCOL.md) over ZMTP 3
// without a ZeroMQ library, encrypted if Keys are given.
//
//	w := make([]float32, 12)
//	worker, err := weightbus.Dial(ctx, "tcp://localhost:5555", weightbus.Options{
//		Models: map[string]weightbus.Tensors{"policy": {"w": weightbus.F32(w, 4, 3)}},
//	})
//	...
//	update, err := worker.Receive(ctx) // w now holds update.Version
//
// Versions are received in the background, and applied only while Receive runs. Other goroutines
// read the weights inside Worker.Read, which never shows a partly applied version.
package weightbus
