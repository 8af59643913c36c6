// Gradio's progress displays, which this page hides, ask for every frame, for a clock and for springs that
// never come to rest. They get two a second, or an idle page would keep the processor busy. Runs before Gradio's
// scripts, which take the function when they are loaded.
{
  const nextFrame = window.requestAnimationFrame.bind(window);
  const isDisplay = /\(performance\.now\(\)-|\.tasks\.forEach\(/;
  window.requestAnimationFrame = (callback) =>
    isDisplay.test(callback) ? setTimeout(callback, 500) : nextFrame(callback);
}
